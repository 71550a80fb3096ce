"""Training heads that draft: hidden rows of the target from our own decoder, modules of torch, the loop."""
