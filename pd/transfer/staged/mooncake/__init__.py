"""KV over Mooncake's transfer engine."""
