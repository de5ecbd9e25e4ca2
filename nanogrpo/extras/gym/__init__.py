"""Problems of reasoning-gym, and their reward. Start with data.py."""
