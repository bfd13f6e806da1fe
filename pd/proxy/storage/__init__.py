"""What a proxy keeps for its clients: responses, files and batches."""
