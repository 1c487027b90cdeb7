"""The keywords of `from_pretrained`: each is applied, without effect for a stated reason, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unspool.errors import SettingError, UnsupportedError, excerpt
from unspool.wording import suggest

Fate = Literal["applied", "without effect", "refused"]


@dataclass(frozen=True, slots=True)
class Keyword:
    """What happens to a keyword, and why."""

    name: str
    fate: Fate
    words: str  # what it does, why it does nothing, or what to use instead
    harmless: tuple[Any, ...] = (None, False)  # values of a refused one that ask for nothing


def _list(fate: Fate, **words: str) -> list[Keyword]:
    return [Keyword(name, fate, text) for name, text in words.items()]


_SHARED = [
    *_list(
        "applied",
        revision="the branch, tag or commit of a hub id; of a folder on this disk, none is chosen",
        token="the hub's access token",
        use_auth_token="the older name of `token`",
        cache_dir="where the hub's files are kept",
        force_download="fetches files again that are in the cache",
        local_files_only="uses what is on this disk, never the network",
        subfolder="the folder inside a folder on this disk; of a hub id it is refused",
    ),
    *_list(
        "without effect",
        trust_remote_code="code in a model's files is never run, and native models need none",
        code_revision="code in a model's files is never run",
        resume_download="downloads are always resumed",
    ),
    *_list(
        "refused",
        proxies="set HTTPS_PROXY in the environment",
        mirror="set HF_ENDPOINT in the environment",
        config="a model is built from the config.json in its folder; write a folder with the config that you want",
    ),
]

_MODEL = [
    *_list(
        "applied",
        dtype="the dtype of the weights; without it float32 on a CPU and the files' own on a GPU",
        torch_dtype="the older name of `dtype`",
        device_map='a device, a strategy ("auto", "balanced", "sequential") or parts and devices: layers over several',
        max_memory="bytes that weights may take of each device: {0: '10GiB', 'cpu': '30GiB'}",
        load_in_8bit="the matrices as 8-bit blocks (quantize='int8')",
        load_in_4bit="the matrices as 4-bit blocks (quantize='int4')",
        quantization_config="a BitsAndBytesConfig, ours or transformers', or a dict of its values: nf4, fp4 or 8 bits",
        generation_config="the model's settings, in place of those of its folder",
        gguf_file="the GGUF file of the folder or of the hub id",
        device="as in unspool.load()",
        quantize="as in unspool.load()",
        threads="as in unspool.load()",
        native="as in unspool.load()",
        progress="as in unspool.load()",
    ),
    *_list(
        "without effect",
        low_cpu_mem_usage="weights are always read once, into the form that they are kept in",
        attn_implementation="there is one attention; weights are returned by any model with output_attentions=True",
        weights_only="pickles are read as weights only, by a confined process",
        use_kernels="the fastest kernels that run here are used",
        _fast_init="nothing is initialised before it is read",
        offload_state_dict="no second copy of the weights is made",
    ),
    *_list(
        "refused",
        state_dict="weights are read from files; write a folder with model.safetensors",
        from_tf="give a folder with safetensors",
        from_flax="give a folder with safetensors",
        ignore_mismatched_sizes="weights of other sizes are not a text model's",
        output_loading_info="a model whose files lack a tensor is not loaded, and the error names the tensor",
        offload_folder="weights are held in memory; use quantization to make them smaller",
        offload_buffers="weights are held in memory; use quantization to make them smaller",
        tp_plan="a layer lies on one device; use device_map",
        tp_size="a layer lies on one device; use device_map",
        device_mesh="a layer lies on one device; use device_map",
        distributed_config="a layer lies on one device; use device_map",
        key_mapping="tensors are found by the names of their architecture",
        variant="weights are those of model.safetensors; rename the files, or use another repository",
        adapter_kwargs="merge the adapter into the weights first",
        kernel_config="the fastest kernels that run here are used; leave it out",
        experts_implementation="the fastest kernels that run here are used; leave it out",
        fusion_config="matrices are fused where it is faster; leave it out",
        output_attentions="ask for them in the call: generate(…, output_attentions=True)",
        output_hidden_states="ask for them in the call: generate(…, output_hidden_states=True)",
    ),
    Keyword("use_safetensors", "refused", "pickles are read where there is nothing else; leave it out", (None, True)),
]

_TOKENIZER = [
    *_list(
        "applied",
        padding_side="the side that is filled; without it the folder's, or the right one",
        truncation_side="the side that is cut",
        model_max_length="what truncation=True cuts to",
        clean_up_tokenization_spaces="whether decode() closes the spaces before punctuation",
        chat_template="the chat template, in place of the folder's",
        add_prefix_space="whether a text is read as if a space preceded it",
        bos_token="the token of that name, out of the vocabulary",
        eos_token="likewise",
        unk_token="likewise",
        pad_token="likewise",
        sep_token="likewise",
        cls_token="likewise",
        mask_token="likewise",
        src_lang="the source's language, for NLLB, mBART and M2M-100",
        gguf_file="the GGUF file of the folder or of the hub id",
    ),
    *_list(
        "without effect",
        use_fast="there is one tokenizer, the fast one",
        legacy="tokenizer.json says how texts are cut",
        from_slow="tokenizer.json says how texts are cut",
        tokenizer_type="the folder's files say which tokenizer it is",
        _from_auto="as in transformers",
    ),
    *_list(
        "refused",
        tgt_lang="pass forced_bos_token_id=tokenizer.convert_tokens_to_ids(language) to generate()",
        add_bos_token="tokenizer.json says it; pass add_special_tokens to the call",
        add_eos_token="tokenizer.json says it; pass add_special_tokens to the call",
        split_special_tokens="special tokens are always read whole",
        extra_special_tokens="a vocabulary does not grow; use tokens that it has",
        additional_special_tokens="a vocabulary does not grow; use tokens that it has",
        tokenizer_file="give the folder that it lies in",
        vocab_file="give the folder that it lies in",
        merges_file="give the folder that it lies in",
    ),
]

CONFIG_KEYWORDS = {keyword.name: keyword for keyword in _SHARED} | {"gguf_file": Keyword("gguf_file", "applied", "")}
MODEL_KEYWORDS = {keyword.name: keyword for keyword in (*_SHARED, *_MODEL)}
TOKENIZER_KEYWORDS = {keyword.name: keyword for keyword in (*_SHARED, *_TOKENIZER)}


def take_applied(
    given: Mapping[str, Any], table: Mapping[str, Keyword], caller: str, others: Iterable[str] = ()
) -> dict[str, Any]:
    """The keywords that are applied; raises for a refused or an unknown one. `others` are known beside the table."""
    applied: dict[str, Any] = {}
    known = {*others}
    for name, value in given.items():
        keyword = table.get(name)
        if keyword is None and name not in known:
            raise SettingError(f"{caller} does not know {name!r:.80}{suggest(name, (*table, *known))}")
        if keyword is None or keyword.fate == "applied":
            applied[name] = value
        elif keyword.fate == "refused" and not any(value is one for one in keyword.harmless):
            raise UnsupportedError(f"{caller} can't take {name}={excerpt(value)}: {keyword.words}")
    return applied
