"""The volume beside other people's tools: what `scripts/bench` is made of."""
