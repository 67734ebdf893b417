"""A model run again on recorded steps. Knows states and tensors, no files of a log and no people; decides nothing."""
