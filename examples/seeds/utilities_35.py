from unspool import AutoModelForCausalLM, AutoTokenizer, AsyncTextIteratorStreamer
from threading import Thread
import asyncio

tok = AutoTokenizer.from_pretrained("models/gpt2")
model = AutoModelForCausalLM.from_pretrained("models/gpt2")
inputs = tok(["An increasing sequence: one,"], return_tensors="pt")

# Run the generation in a separate thread, so that we can fetch the generated text in a non-blocking way.
async def main():
    # Important: AsyncTextIteratorStreamer must be initialized inside a coroutine!
    streamer = AsyncTextIteratorStreamer(tok)
    generation_kwargs = dict(inputs, streamer=streamer, max_new_tokens=20)
    thread = Thread(target=model.generate, kwargs=generation_kwargs)
    thread.start()
    generated_text = ""
    async for new_text in streamer:
        generated_text += new_text
    print(generated_text)
asyncio.run(main())
