from unspool import AutoTokenizer, AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")
inputs = tokenizer(["In a word, the cake is a"], return_tensors="pt")

output_ids = model.generate(inputs["input_ids"], max_new_tokens=5, pad_token_id=tokenizer.eos_token_id)
print(tokenizer.batch_decode(output_ids, skip_special_tokens=True)[0])

# Now let's take the bad words out. Please note that the tokenizer is initialized differently
tokenizer_with_prefix_space = AutoTokenizer.from_pretrained("models/gpt2", add_prefix_space=True)

def get_tokens_as_list(word_list):
    "Converts a sequence of words into a list of tokens"
    tokens_list = []
    for word in word_list:
        tokenized_word = tokenizer_with_prefix_space([word], add_special_tokens=False).input_ids[0]
        tokens_list.append(tokenized_word)
    return tokens_list

bad_words_ids = get_tokens_as_list(word_list=["mess"])
output_ids = model.generate(
    inputs["input_ids"], max_new_tokens=5, bad_words_ids=bad_words_ids, pad_token_id=tokenizer.eos_token_id
)
print(tokenizer.batch_decode(output_ids, skip_special_tokens=True)[0])
