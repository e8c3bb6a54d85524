; Large constants of a library and the function that answers with them; mapped.py fills in the braces
; and says why. LLVM's assembler copies the file with the data.
;
; Weights that are to be expanded are taps of the data, a function, and zeroed memory of the library,
; which takes no room in the file. Threads that ask for them at once all expand them, to the same
; bytes: no thread waits, and a fork in the middle leaves no lock behind. It is marked done only after
; all bytes are written.
;
; A constant is a DLManagedTensor of DLPack, which TVM makes a tensor of that has no memory of its
; own. 70 is the number of that type in TVM's function calls, whose arguments and result are 16 bytes
; each: a type, 4 bytes of nothing, a value.

target triple = "{triple}"

module asm ".section .rodata.relayquant, \22a\22, %progbits"
module asm ".balign {alignment}"
module asm "relayquant_data:"
module asm ".incbin \22{path}\22"
module asm ".previous"

; data, device, its number, dimensions, kind of type, its bits, its lanes, shape, strides, offset
%tensor = type {{ ptr, i32, i32, i32, i8, i8, i16, ptr, ptr, i64 }}
; tensor, context, what is called when nobody reads it any more
%managed = type {{ %tensor, ptr, ptr }}

; taps, what expands them, columns of taps; nothing of a constant that is stored as it is read
%source = type {{ ptr, ptr, i64 }}

@relayquant_data = external hidden constant i8
@memory = internal global [{bytes} x i8] zeroinitializer, align {alignment}
@done = internal global [{count} x i8] zeroinitializer
{shapes}
@tensors = private constant [{count} x %managed] [
    {tensors}
]
@sources = private constant [{count} x %source] [
    {sources}
]

{expanders}
declare i32 @TVMFFITensorFromDLPack(ptr, i32, i32, ptr)

; The argument is the number of a constant.
define i32 @__tvm_ffi_{provider}(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
entry:
  %at = getelementptr i8, ptr %arguments, i64 8
  %number = load i64, ptr %at
  %tensor = getelementptr [{count} x %managed], ptr @tensors, i64 0, i64 %number
  %source = getelementptr [{count} x %source], ptr @sources, i64 0, i64 %number
  %taps = load ptr, ptr %source
  %stored = icmp eq ptr %taps, null
  br i1 %stored, label %answer, label %look
look:
  %mark = getelementptr [{count} x i8], ptr @done, i64 0, i64 %number
  %state = load atomic i8, ptr %mark acquire, align 1
  %is_done = icmp ne i8 %state, 0
  br i1 %is_done, label %answer, label %expand
expand:
  %function_at = getelementptr %source, ptr %source, i64 0, i32 1
  %function = load ptr, ptr %function_at
  %columns_at = getelementptr %source, ptr %source, i64 0, i32 2
  %columns = load i64, ptr %columns_at
  %data = load ptr, ptr %tensor
  %always_0 = call i32 %function(ptr %taps, ptr %data, i64 %columns)
  store atomic i8 1, ptr %mark release, align 1
  br label %answer
answer:
  %object = getelementptr i8, ptr %result, i64 8
  %status = call i32 @TVMFFITensorFromDLPack(ptr %tensor, i32 0, i32 0, ptr %object)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %end, label %done
done:
  store i64 70, ptr %result
  br label %end
end:
  ret i32 %status
}}

!llvm.module.flags = !{{!0, !1}}
!0 = !{{i32 2, !"tvm_target", !"{target}"}}
!1 = !{{i32 8, !"PIC Level", i32 2}}
