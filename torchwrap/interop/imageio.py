"""imageio: videos, through ffmpeg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v2
import numpy as np


class Video:
    """An mp4 file, written frame by frame; it has its name when it is whole.

    Args:
        path: where it goes, in a folder that is made.
        fps: frames a second.
    """

    def __init__(self, path: Path, fps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.length = path, 0
        self._part = path.with_name(f".{path.name}")
        self._writer: Any = imageio.v2.get_writer(self._part, format="FFMPEG", fps=fps, codec="libx264", macro_block_size=2)  # type: ignore[arg-type]

    def append(self, frame: Any) -> None:
        """Adds a picture `(height, width, 3)` uint8; odd sizes get a line of black, for the codec takes even ones."""
        height, width, _ = np.shape(frame)
        self._writer.append_data(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0))))
        self.length += 1

    def close(self) -> None:
        """Finishes the file."""
        self._writer.close()
        self._part.rename(self.path)
