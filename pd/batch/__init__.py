"""``pd-launch batch``: requests of a file, as OpenAI's Batch API has them, sent to a server."""
