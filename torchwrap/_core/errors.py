"""The form of every error message: who, which argument, what was given, and what to do."""

from __future__ import annotations


def refusal(
    owner: str,
    must: str,
    got: object = None,
    remedy: str = "",
) -> str:
    """The text of an error: "owner: argument must be A, got B. Remedy."

    Args:
        owner: the class, function or layer, such as "NormalizeReward".
        must: names the argument and says what it must be, such as "gamma must be in [0, 1]"; or any
            other fault.
        got: the value or a description of it, which is shown by `str`. None leaves it out.
        remedy: a sentence that says what to do, without its full stop. Empty if that is obvious.

    >>> refusal("NormalizeReward", "gamma must be in [0, 1]", 1.5, "Use 0.99 for most tasks")
    'NormalizeReward: gamma must be in [0, 1], got 1.5. Use 0.99 for most tasks.'
    """
    text = f"{owner}: {must}"
    if got is not None:
        text += f", got {got}"
    if remedy:
        text += f". {remedy}"
    return f"{text}."
