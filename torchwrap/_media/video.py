"""Video files, written with imageio and ffmpeg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v2
import numpy as np


class Video:
    """An mp4 file, written frame by frame. Until `close` it has a temporary name, so that a named file is always complete.

    Args:
        path: of the file. Its folder is created.
        fps: frames per second.
    """

    def __init__(self, path: Path, fps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.length = path, 0
        self._temporary_path = path.with_name(f".{path.name}")
        self._writer: Any = imageio.v2.get_writer(
            self._temporary_path, format="FFMPEG", fps=fps, codec="libx264", macro_block_size=2
        )  # type: ignore[arg-type]

    def append(self, frame: Any) -> None:
        """Appends a frame `(height, width, 3)` uint8. Odd sizes are padded with black, because the codec needs even ones."""
        height, width, _ = np.shape(frame)
        self._writer.append_data(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0))))
        self.length += 1

    def close(self) -> None:
        """Completes the file and gives it its name."""
        self._writer.close()
        self._temporary_path.rename(self.path)
