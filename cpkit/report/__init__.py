"""Plans and replays as text for people: tables, owner strips, whole reports. Nothing here computes a plan."""
