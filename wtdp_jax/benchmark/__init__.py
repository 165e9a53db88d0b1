"""What the benchmark scripts share: timing, what a step costs, tables, figures, records of a run."""
