"""Other libraries, one a file, imported only when its file is."""
