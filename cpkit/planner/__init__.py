"""Pure planning over numpy: ranks and sizes are arguments; nothing here touches a device or a process group."""
