from unspool import AutoModelForCausalLM, AutoTokenizer, CompileConfig

tokenizer = AutoTokenizer.from_pretrained('models/gemma2')
model = AutoModelForCausalLM.from_pretrained('models/gemma2').to("cpu")

# Automatic compile configuration, used with static cache
compile_config = CompileConfig(dynamic=True, backend="eager")

# Generation with static cache and compile config
input = tokenizer.encode("Hello there, how", return_tensors="pt").to("cpu")
output = model.generate(
    input, do_sample=False, max_new_tokens=4, cache_implementation="static", compile_config=compile_config
)
output_text = tokenizer.batch_decode(output, skip_special_tokens=True)[0]
