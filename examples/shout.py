"""A backend of two dozen lines: text in, louder text out, one chunk per input."""

from collections.abc import Sequence

from stretto.backends.contract import Capabilities, Chunk, Input, LoadProgress, Outcome, Task


class Shout:
    """Turns text into capitals and adds a mark.

    Args:
        mark: What each chunk ends with.
    """

    capabilities = Capabilities(kind="function", unit="characters")

    def __init__(self, mark: str = "!") -> None:
        self._mark = mark

    def load(self, progress: LoadProgress) -> None:
        """Nothing to load."""
        progress("nothing", 1.0)

    def open(self, task: Task) -> Task:
        """The state of a task is the task itself."""
        return task

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """Shout each item's text."""
        return [self._shout(item) for _, item in items]

    def close(self, state: Task) -> None:
        """Nothing to release."""

    def _shout(self, item: Input) -> Outcome:
        text = item.payload.get("text")
        if not isinstance(text, str):
            return []  # the last item of a task may be empty
        louder = text.upper() + self._mark
        return [Chunk(values={"text": louder}, length=len(louder))]
