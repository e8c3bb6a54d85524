; Products of bfloat16 added to sums in float32 (bfmmla, bfdot), and rounding (bfcvtn). TVM cannot pass
; vectors of bfloat16 to the instructions: it computes such values in float32. arm_bf16.py explains
; the rest.

declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)
declare <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(<4 x float>, <8 x bfloat>, <8 x bfloat>)

define linkonce_odr hidden <4 x float> @relayquant_bfmmla(<4 x float> %sums, <4 x i32> %a, <4 x i32> %b) alwaysinline {
entry:
  %x = bitcast <4 x i32> %a to <8 x bfloat>
  %y = bitcast <4 x i32> %b to <8 x bfloat>
  %result = call <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float> %sums, <8 x bfloat> %x, <8 x bfloat> %y)
  ret <4 x float> %result
}

define linkonce_odr hidden <4 x float> @relayquant_bfdot(<4 x float> %sums, <4 x i32> %a, <4 x i32> %b) alwaysinline {
entry:
  %x = bitcast <4 x i32> %a to <8 x bfloat>
  %y = bitcast <4 x i32> %b to <8 x bfloat>
  %result = call <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(<4 x float> %sums, <8 x bfloat> %x, <8 x bfloat> %y)
  ret <4 x float> %result
}

define linkonce_odr hidden <4 x i16> @relayquant_round_bf16_4(<4 x float> %values) alwaysinline {
entry:
  %rounded = fptrunc <4 x float> %values to <4 x bfloat>
  %bits = bitcast <4 x bfloat> %rounded to <4 x i16>
  ret <4 x i16> %bits
}

define linkonce_odr hidden <8 x i16> @relayquant_round_bf16_8(<8 x float> %values) alwaysinline {
entry:
  %rounded = fptrunc <8 x float> %values to <8 x bfloat>
  %bits = bitcast <8 x bfloat> %rounded to <8 x i16>
  ret <8 x i16> %bits
}
