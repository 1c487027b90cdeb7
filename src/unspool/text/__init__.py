"""Text: tokenizers, chat templates (`text.chat`, imported when one is rendered), and text from tokens as they come."""

from unspool.text.detokenize import Detokenizer
from unspool.text.encoding import Encoding
from unspool.text.gguf_vocabulary import tokenizer_from_gguf
from unspool.text.opening import open_tokenizer
from unspool.text.stop_text import StopText
from unspool.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Encoding", "StopText", "Tokenizer", "open_tokenizer", "tokenizer_from_gguf"]
