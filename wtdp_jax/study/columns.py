"""The columns of the report's tables."""

from wtdp_jax.benchmark.tables import Column

SERIES = (
    Column("arm", "arm"),
    Column("target epsilon", "target_epsilon", "g"),
    Column("seeds", "seeds"),
    Column("accuracy, %", "accuracy", ".2f"),
    Column("standard deviation", "deviation", ".2f"),
    Column("95% interval", "interval"),
    Column("epsilon", "epsilon", ".3g"),
    Column("claimed epsilon", "epsilon_claimed", ".3g"),
    Column("learning rate", "learning_rate", "g"),
    Column("clip norm", "l2_clip_norm", "g"),
    Column("example gradients", "examples", ","),
    Column("read it as", "says"),
)
GAPS = (
    Column("difference", "contrast"),
    Column("target epsilon", "target_epsilon", "g"),
    Column("seeds", "seeds"),
    Column("points", "points", "+.2f"),
    Column("95% interval", "interval"),
    Column("verdict", "verdict"),
)
FACTORS = (
    Column("factor", "contrast"),
    Column("part", "part"),
    Column("seeds", "seeds"),
    Column("points", "points", "+.2f"),
    Column("95% interval", "interval"),
    Column("verdict", "verdict"),
    Column("share of the gap, %", "share", ".0f"),
)
SAME = (
    Column("arm", "arm"),
    Column("beside", "reference"),
    Column("target epsilon", "target_epsilon", "g"),
    Column("steps", "steps"),
    Column("largest difference of losses, nats (non-private)", "non_private_largest_loss_difference", ".2g"),
    Column("same within 1e-4", "same"),
)
SIGNAL = (
    Column("arm", "arm"),
    Column("target epsilon", "target_epsilon", "g"),
    Column("trained parameters", "parameters", ","),
    Column("norm of the noise", "noise_norm", ".4g"),
    Column("signal to noise (non-private)", "non_private_signal_to_noise", ".4g"),
    Column("clipped, % (non-private)", "non_private_clipped_fraction", ".1f", 1e-2),
)
COSTS = (
    Column("step", "name"),
    Column("memory, MB", "step_bytes", ".2f", 1e6),
    Column("over tied non-private", "memory_ratio", ".3f"),
    Column("time, ms", "median_seconds", ".1f", 1e-3),
    Column("over tied non-private", "time_ratio", ".3f"),
)
ACCURACY_CLAIMS = (
    Column("model, task, loss", "place"),
    Column("baseline", "baseline"),
    Column("target epsilon", "target_epsilon", "g"),
    Column("paper, points", "paper"),
    Column("seeds", "seeds"),
    Column("here, points", "points", "+.2f"),
    Column("95% interval", "interval"),
    Column("verdict", "verdict"),
)
MEMORY_CLAIMS = (
    Column("model, task, loss", "place"),
    Column("measured at", "size"),
    Column("baseline", "baseline"),
    Column("paper", "paper"),
    Column("here, % less", "saving", ".1f"),
    Column("verdict", "verdict"),
)
CHOICES = (
    Column("series", "series"),
    Column("learning rate", "learning_rate", "g"),
    Column("clip norm", "l2_clip_norm", "g"),
    Column("held-out loss", "held_out_loss", ".4f"),
    Column("held-out accuracy, %", "held_out_accuracy", ".2f", 0.01),
    Column("of candidates", "candidates"),
    Column("at the grid's edge", "edge"),
)
