"""The configuration tree, which Hydra finds as `pkg://opd.conf`: train.yaml, and a folder of options per group."""
