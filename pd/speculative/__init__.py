"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one step."""
