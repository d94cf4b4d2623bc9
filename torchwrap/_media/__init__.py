"""Video files and windows. Private: each module imports one optional dependency."""
