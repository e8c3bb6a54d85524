"""`finetune`: a trainable module follows its float model; losses, units of steps and the loop."""
