"""Runs the pipeline of `shout.yaml` in an engine of its own and prints what it says."""

import asyncio
import os
from pathlib import Path

from stretto import Engine


async def main() -> None:
    """Ask once."""
    os.chdir(Path(__file__).parent)  # `shout:Shout` is found in the current folder
    async with Engine.from_pipeline("shout.yaml") as engine:
        async for chunk in engine.generate(text="the next voice enters early"):
            if not chunk.final:
                print(chunk.values["text"])


if __name__ == "__main__":
    asyncio.run(main())
