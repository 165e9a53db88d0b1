"""The optimizer that turns a sum of gradients into an update, from optax."""

import optax

from wtdp_jax.config import TrainConfig


def make_optimizer(config: TrainConfig, num_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of mean gradients, without noise.

    Args:
      config: names optimizer and schedule.
      num_steps: optimizer steps of the whole run.

    Raises:
      ValueError: if the warmup takes the whole run, or the schedule is laid out for fewer steps.
    """
    learning_rate = learning_rate_schedule(config, num_steps)
    if config.optimizer == "sgd":
        return optax.sgd(learning_rate, momentum=config.momentum or None)
    return optax.adam(learning_rate)


def learning_rate_schedule(config: TrainConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate at steps 0 to `num_steps` - 1; it is positive at each, so none is wasted.

    Raises:
      ValueError: if the warmup takes the whole run, or the schedule is laid out for fewer steps.
    """
    peak, warmup_steps = config.learning_rate, config.warmup_steps
    if warmup_steps >= num_steps:
        raise ValueError(f"warmup_steps must be below the number of steps ({num_steps}), got {warmup_steps}")
    length = config.schedule_steps or num_steps
    if length < num_steps:
        raise ValueError(f"schedule_steps must be at least the number of steps ({num_steps}), got {length}")
    courses = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, length - warmup_steps),
        "cosine": optax.cosine_decay_schedule(peak, length - warmup_steps),
    }
    if not warmup_steps:
        return courses[config.schedule]
    warmup = optax.linear_schedule(peak / warmup_steps, peak + peak / warmup_steps, warmup_steps)
    return optax.join_schedules([warmup, courses[config.schedule]], [warmup_steps])
