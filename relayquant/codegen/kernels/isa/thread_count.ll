; Counts the threads that share a parallel loop: of the pool (pool.py), and of TVM's runtime if there
; is no pool. It is TVM_NUM_THREADS, or the number of processors that the process may use. With SMT
; it is halved: one thread of a kernel keeps the units of a core busy. Every library counts once.

@relayquant_threads = linkonce_odr hidden global i32 0
@relayquant_variable = linkonce_odr hidden constant [16 x i8] c"TVM_NUM_THREADS\00"
@relayquant_smt_file = linkonce_odr hidden constant [35 x i8] c"/sys/devices/system/cpu/smt/active\00"
@relayquant_read_mode = linkonce_odr hidden constant [2 x i8] c"r\00"

declare ptr @getenv(ptr)
declare i32 @atoi(ptr)
declare i32 @sched_getaffinity(i32, i64, ptr)
declare ptr @fopen(ptr, ptr)
declare i32 @fgetc(ptr)
declare i32 @fclose(ptr)
declare i64 @llvm.ctpop.i64(i64)

define linkonce_odr hidden i32 @relayquant_count_threads() {
entry:
  %mask = alloca [16 x i64]
  %cached = load atomic i32, ptr @relayquant_threads monotonic, align 4
  %is_known = icmp ne i32 %cached, 0
  br i1 %is_known, label %answer, label %begin
answer:
  ret i32 %cached
begin:
  %text = call ptr @getenv(ptr @relayquant_variable)
  %unset = icmp eq ptr %text, null
  br i1 %unset, label %ask, label %read
read:
  %number = call i32 @atoi(ptr %text)
  %valid = icmp sgt i32 %number, 0
  br i1 %valid, label %given, label %ask
given:
  store atomic i32 %number, ptr @relayquant_threads monotonic, align 4
  ret i32 %number
ask:
  %error = call i32 @sched_getaffinity(i32 0, i64 128, ptr %mask)
  %known = icmp eq i32 %error, 0
  br i1 %known, label %next, label %one
one:
  store atomic i32 1, ptr @relayquant_threads monotonic, align 4
  ret i32 1
next:
  %word = phi i64 [ 0, %ask ], [ %following, %next ]
  %count = phi i64 [ 0, %ask ], [ %sum, %next ]
  %address = getelementptr i64, ptr %mask, i64 %word
  %bits = load i64, ptr %address
  %ones = call i64 @llvm.ctpop.i64(i64 %bits)
  %sum = add i64 %count, %ones
  %following = add i64 %word, 1
  %more = icmp slt i64 %following, 16
  br i1 %more, label %next, label %counted
counted:
  %cores = trunc i64 %sum to i32
  %file = call ptr @fopen(ptr @relayquant_smt_file, ptr @relayquant_read_mode)
  %absent = icmp eq ptr %file, null
  br i1 %absent, label %all, label %look
look:
  %character = call i32 @fgetc(ptr %file)
  call i32 @fclose(ptr %file)
  %shared = icmp eq i32 %character, 49            ; "1"
  br i1 %shared, label %half, label %all
half:
  %up = add i32 %cores, 1
  %halved = lshr i32 %up, 1
  store atomic i32 %halved, ptr @relayquant_threads monotonic, align 4
  ret i32 %halved
all:
  store atomic i32 %cores, ptr @relayquant_threads monotonic, align 4
  ret i32 %cores
}
