; Large constants of a library and the function that returns them. mmap_constants.py fills in the
; braces and explains the reason. Another object file has the data.
;
; Expanded weights are described by taps in the data, a function, and zeroed memory of the library,
; which takes no room in the file. If several threads ask for the same weights at once, all of them
; expand the weights, to the same bytes. So no thread waits, and a fork leaves no lock behind. The
; weights are marked as done only after all bytes are written.
;
; A constant is a DLManagedTensor of DLPack. TVM makes a tensor of it that does not own its memory.
; 70 is the type number of tensors in TVM's function calls. Arguments and result of a call have 16
; bytes each: a type, 4 unused bytes, a value.

target triple = "{triple}"

; data, device, device number, dimensions, type code, bits, lanes, shape, strides, offset
%tensor = type {{ ptr, i32, i32, i32, i8, i8, i16, ptr, ptr, i64 }}
; tensor, context, deleter
%managed = type {{ %tensor, ptr, ptr }}

; taps, function that expands them, columns of taps; zeros for a constant that is stored as kernels read it
%source = type {{ ptr, ptr, i64 }}

@{data} = external hidden constant i8
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
