"""A window, with pygame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pygame


class Window:
    """A window that shows frames at a fixed rate.

    Args:
        size: (width, height), in pixels. None takes the size of the first frame.
        fps: frames per second.
    """

    def __init__(self, size: tuple[int, int] | None, fps: int) -> None:
        self.size, self.fps = size, fps
        self._screen: Any = None

    def show(self, frame: Any) -> None:
        """Shows a frame `(height, width, 3)` uint8, scaled to the window. It waits, so as not to exceed the frame rate."""
        surface = pygame.surfarray.make_surface(np.swapaxes(frame, 0, 1))
        if self._screen is None:
            pygame.display.init()
            self._screen = pygame.display.set_mode(self.size or surface.get_size())
            self._clock = pygame.time.Clock()
        self._screen.blit(pygame.transform.smoothscale(surface, self._screen.get_size()), (0, 0))
        pygame.event.pump()
        pygame.display.flip()
        self._clock.tick(self.fps)

    def close(self) -> None:
        """Closes the window."""
        if self._screen is not None:
            pygame.display.quit()
            self._screen = None
