"""Attacks on the guarantee: what an adversary who sees everything but the noise can prove of epsilon.

An audit can refute a stated epsilon and never confirm it. It is here to find faults; its own tests plant
some.
"""
