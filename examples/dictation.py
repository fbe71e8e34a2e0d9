"""Sends a text word by word into a running request, and prints each answer before the next word is sent."""

import asyncio

from stretto import Engine

SCRIPT = '{"tone": {"mode": "upper"}, "relay": {"mode": "echo"}}'  # no model: the words in capitals


async def main() -> None:
    """Dictate three words."""
    async with Engine.from_pipeline("scripted") as engine:
        stream = engine.generate(open_inputs=("text",), options={"script": SCRIPT})
        for word in ("still", "being", "written"):
            stream.append(text=word)
            answer = await anext(stream)
            print(answer.values["text"])
        stream.close_input("text")
        async for chunk in stream:
            assert chunk.final


if __name__ == "__main__":
    asyncio.run(main())
