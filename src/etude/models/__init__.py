"""Loading models, rendering chats token-exact, tiny models for tests."""
