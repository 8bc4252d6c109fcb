"""Swarms of up to a thousand peers in one process: the product's round machines on modelled links (`__main__`)."""
