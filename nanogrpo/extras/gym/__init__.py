"""Problems from reasoning-gym, and their reward. Start with data.py."""
