"""The log's tool: reads what an engine recorded and folds it again. Knows states and decisions; no device, no torch."""
