import torch, unspool
from tests.conformance.cases import load_model, read_cases
torch.manual_seed(0)
for name in ("gemma2","mistral","llama"):
    m = load_model(name).model
    print(name, m.info.window, m.info.layer_kinds, m.info.max_context)
    V=m.info.vocab_size
    ids=torch.randint(3,V,(3,30)); mask=torch.ones_like(ids); mask[0,:11]=0; mask[1,:25]=0
    base={}
    for kw in ({}, {"num_beams":3}, {"do_sample":True,"seed":3}, {"prefill_chunk_size":7}):
        ref=unspool.generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=25,use_cache=False,**kw) if "prefill_chunk_size" not in kw else unspool.generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=25,use_cache=False)
        for kind in ("dynamic","offloaded","offloaded_static","hybrid"):
            if kind=="sliding_window" and name!="mistral": continue
            out=unspool.generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=25,cache_implementation=kind,**kw)
            print(kw,kind,torch.equal(ref,out))
