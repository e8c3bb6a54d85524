"""ONNX reader: operators of other domains: com.microsoft and ai.onnx.ml. `table` lists them."""
