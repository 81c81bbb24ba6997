"""Agents that talk to the policy: sessions, safe rendering of messages, and the gateway that they call."""
