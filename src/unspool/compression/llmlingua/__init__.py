"""The class `PromptCompressor`: what the package llmlingua answers, computed by models of unspool's own."""
