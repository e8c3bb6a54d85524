; Adds the products of 16 pairs of bfloat16 to 16 sums in float32 (vdpbf16ps). TVM cannot pass vectors
; of bfloat16 to the instruction: it computes such values in float32. bf16.py explains the rest.

declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)

define linkonce_odr hidden <16 x float> @relayquant_dot_bf16(<16 x float> %sums, <16 x i32> %a, <16 x i32> %b) alwaysinline {
entry:
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %result = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %result
}
