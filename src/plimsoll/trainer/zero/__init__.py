"""The engine on DeepSpeed ZeRO: its settings and their price, without torch; and what runs it."""
