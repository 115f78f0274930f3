"""What the commands of ``kbf`` do, once the command line is understood: one file each."""
