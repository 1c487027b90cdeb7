from unspool import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
    "models/llama", device_map="auto", load_in_4bit=True
)

from unspool import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/llama")
model_inputs = tokenizer(["A list of colors: red, blue"], return_tensors="pt")

generated_output = model.generate(**model_inputs)
tokenizer.batch_decode(generated_output, skip_special_tokens=True)
