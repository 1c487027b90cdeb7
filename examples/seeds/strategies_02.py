from unspool import AutoModelForCausalLM, GenerationConfig

model = AutoModelForCausalLM.from_pretrained("models/llama")
generation_config = GenerationConfig(
    max_new_tokens=50, do_sample=True, top_k=50, eos_token_id=model.config.eos_token_id
)
generation_config.save_pretrained("presets", push_to_hub=False)
