"""Parts of senders and receivers that the backends share."""
