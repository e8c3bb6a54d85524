; The thread pool of compiled libraries: bodies of the functions that pool.py declares. They are
; written in LLVM IR because TIR has no atomic operations.
;
; A launch has one chunk ("part") for each thread of the pool. The caller computes part 0. Each
; worker watches its own slot and claims the part with the slot's number. After that, workers and
; caller claim parts that nobody has started. So the caller waits only for parts that are running,
; never for a worker without a processor. It needs no worker at all (after a fork there is none).
;
; A slot holds 2 * launch while its part is free and 2 * launch + 1 once it is claimed, by one
; compare-and-exchange. The thread that claimed a part of launch n may read @function, @data and
; @environment: launch n is not over before the part is subtracted from @left, and only then may
; another launch begin.
;
; With more threads than processors, workers do harm. A worker that loses its processor in the
; middle of a part keeps the caller waiting for a time slice of the scheduler (milliseconds). Each
; worker that wakes up may also take the caller's processor. So there is an account, @credit, in
; nanoseconds. Parts that workers compute are added. Subtracted are the time to wake workers, the
; caller's waiting, and {switch} for each time that another thread got the caller's processor. Single
; losses do not matter, since more is saved between them. When the credit is spent, workers back off
; for {min_backoff} nanoseconds. The time doubles if this happens again soon, up to {max_backoff}.
;
; Between the kernels of one run workers stay awake, since the next launch is microseconds away.
; After {worker_turns} turns without a launch they sleep. Waking a worker takes microseconds, so the caller
; wakes two, each of them wakes two more, and so on. Each side changes its counter first (@sleepers,
; @waiting) and then reads what the other side writes (the slots, @left), sequentially consistent on
; both sides. So no thread misses its wake-up.
;
; Linux wakes a thread on the processor that it last ran on or on the waker's, unless it finds an idle
; one. In a virtual machine it finds none after a pause of milliseconds: the host has stopped all idle
; processors, and to Linux they look busy. So caller and worker would share a processor beside an idle
; one. Before it wakes workers, the caller excludes its own processor and each other's from their sets
; (@pool_spread), and if enough are left, the other thread of each core (SMT). A worker that is awake
; takes its whole set back. A caller that sleeps stays on its processor (@pool_stay), because the worker
; that wakes it is on another. Some filters of system calls end a process for this. TVM_BIND_THREADS=0
; turns it off, as it does for TVM's own threads.

%environment = type {{ ptr, i32 }}

@lock = internal global i32 0, align 64           ; 1: a caller has the pool
@threads = internal global i32 0                  ; caller and workers; 0: not started
@process = internal global i32 0                  ; process that started the workers
@binds = internal global i32 1                    ; 0: all threads keep their sets of processors
@bind_variable = internal constant [17 x i8] c"TVM_BIND_THREADS\00"
; Processors from one thread of a core to the other; 0: one thread a core, or numbers of another kind.
@sibling = internal global i64 0
@sibling_file = internal constant [59 x i8] c"/sys/devices/system/cpu/cpu0/topology/thread_siblings_list\00"
@launch = internal global i64 0                   ; number of the last launch
@function = internal global ptr null              ; of the launch: int (int part, environment*, data*)
@data = internal global ptr null
@environment = internal global %environment zeroinitializer
@left = internal global i32 0, align 64           ; unfinished parts of the launch
@failed = internal global i32 0                   ; error code of a failed part of the launch
@waiting = internal global i32 0                  ; 1: the caller sleeps on @finished
@sleepers = internal global i32 0, align 64       ; workers that sleep on @wake, or are about to
@unwoken = internal global i32 0                  ; called workers that nobody has woken yet
@credit = internal global i64 {max_spin_credit}   ; nanoseconds that workers may still spin
@backoff_until = internal global i64 0            ; when workers are used again; 0: now
@backoff = internal global i64 {min_backoff}      ; how long the last back-off was
@last_backoff = internal global i64 0             ; when it ended
@next_count = internal global i64 0               ; launch at which losses are counted
@counted = internal global i64 0                  ; lost processors at the last count
@counted_thread = internal global i64 0
@stopping = internal global i32 0
@wake = internal global [8 x i64] zeroinitializer, align 64       ; sem_t
@finished = internal global [8 x i64] zeroinitializer, align 64   ; sem_t
@handles = internal global [{most} x i64] zeroinitializer         ; pthread_t
; Of each worker: its slot, and its bed: 0 while it is awake, else 4 * (1 + the processor that it sleeps
; on), plus 1 while the caller changes its set of processors, plus 2 once this is done. @allowed keeps
; the whole set (cpu_set_t), @given what it was changed to; those at 0 are the caller's.
@slots = internal global [{most} x [8 x i64]] zeroinitializer, align 64
@allowed = internal global [{most} x [{cpu_words} x i64]] zeroinitializer
@given = internal global [{most} x [{cpu_words} x i64]] zeroinitializer
; Function that TVM's code calls for every parallel loop. TVM's runtime sets this pointer when it loads
; the code.
@__TVMBackendParallelLaunch = external global ptr
@llvm.global_dtors = appending global [1 x {{ i32, ptr, ptr }}]
    [{{ i32, ptr, ptr }} {{ i32 65535, ptr @relayquant_stop, ptr null }}]

declare i32 @relayquant_launch(ptr, ptr, i32)
declare i32 @relayquant_launch_alone(ptr, ptr, i32)
declare i32 @relayquant_work(i64)
declare i32 @relayquant_stop()
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_post(ptr)
declare i32 @sem_wait(ptr)
declare i32 @getpid()
declare i32 @getrusage(i32, ptr)
declare i64 @pthread_self()
declare i32 @pthread_getaffinity_np(i64, i64, ptr)
declare i32 @pthread_setaffinity_np(i64, i64, ptr)
declare i32 @sched_getcpu()
declare i32 @clock_gettime(i32, ptr)
declare i32 @llvm.umin.i32(i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
{declare_pause}

; Called before a parallel loop, so that it is launched here: on the pool if it is worth it.
define i32 @pool_attach(i32 %worth) {{
  %some = icmp ne i32 %worth, 0
  %launch = select i1 %some, ptr @relayquant_launch, ptr @relayquant_launch_alone
  store ptr %launch, ptr @__TVMBackendParallelLaunch
  ret i32 0
}}

; Try to take the pool. 0: the pool is not available, because the caller wants a certain number of
; parts, another caller has the pool, there is only one thread, or workers back off. 1: the caller
; has the pool. 2: the caller has the pool and has to start it.
define i32 @pool_take(i32 %wanted) {{
entry:
  %threads = load atomic i32, ptr @threads acquire, align 4
  %alone = icmp eq i32 %threads, 1
  %own = icmp ne i32 %wanted, 0
  %without = or i1 %alone, %own
  br i1 %without, label %none, label %try
try:
  %attempt = cmpxchg ptr @lock, i32 0, i32 1 acquire monotonic
  %mine = extractvalue {{ i32, i1 }} %attempt, 1
  br i1 %mine, label %taken, label %none
taken:
  %until = load i64, ptr @backoff_until
  %calm = icmp eq i64 %until, 0
  br i1 %calm, label %use, label %backoff
backoff:                                          ; the credit was spent
  %time = call i64 @pool_read_clock()
  %over = icmp sge i64 %time, %until
  br i1 %over, label %resume, label %leave
leave:
  store atomic i32 0, ptr @lock release, align 4
  br label %none
resume:
  store i64 0, ptr @backoff_until
  br label %use
use:
  %now = load atomic i32, ptr @threads monotonic, align 4
  %new = icmp eq i32 %now, 0
  %state = select i1 %new, i32 2, i32 1
  ret i32 %state
none:
  ret i32 0
}}

define i32 @pool_start() {{
entry:
  %wanted = call i32 @relayquant_count_threads()
  %few = icmp slt i32 %wanted, {most}
  %capped = select i1 %few, i32 %wanted, i32 {most}
  %some = icmp sgt i32 %capped, 1
  %threads = select i1 %some, i32 %capped, i32 1
  store atomic i32 %threads, ptr @threads release, align 4
  %process = call i32 @getpid()
  store i32 %process, ptr @process
  call i32 @sem_init(ptr @wake, i32 0, i32 0)
  call i32 @sem_init(ptr @finished, i32 0, i32 0)
  %text = call ptr @getenv(ptr @bind_variable)
  %unset = icmp eq ptr %text, null
  br i1 %unset, label %topology, label %read
read:                                             ; as TVM does
  %number = call i32 @atoi(ptr %text)
  %binds = icmp eq i32 %number, 1
  %flag = zext i1 %binds to i32
  store i32 %flag, ptr @binds
  br label %topology
topology:
  %sibling = call i64 @pool_find_sibling()
  store i64 %sibling, ptr @sibling
  br label %next
next:
  %worker = phi i32 [ 1, %topology ], [ %following, %start ]
  %more = icmp slt i32 %worker, %threads
  br i1 %more, label %start, label %end
start:
  %index = zext i32 %worker to i64
  %handle = getelementptr i64, ptr @handles, i64 %index
  %argument = inttoptr i64 %index to ptr
  %error = call i32 @pthread_create(ptr %handle, ptr null, ptr @relayquant_work, ptr %argument)
  %following = add i32 %worker, 1
  %fine = icmp eq i32 %error, 0
  br i1 %fine, label %next, label %fewer
fewer:                                            ; the system allows no more threads
  store atomic i32 %worker, ptr @threads release, align 4
  br label %end
end:
  ret i32 0
}}

; The distance of the second thread of the first core: 1 of "0-1" and "0,1", 4 of "0,4", 0 of others.
; So is every core's: Linux numbers both threads of a core one after the other, or the first threads
; of all cores before the second ones.
define i64 @pool_find_sibling() {{
entry:
  %file = call ptr @fopen(ptr @sibling_file, ptr @relayquant_read_mode)
  %absent = icmp eq ptr %file, null
  br i1 %absent, label %none, label %first
first:                                            ; "0"
  %zero = call i32 @fgetc(ptr %file)
  %mark = call i32 @fgetc(ptr %file)
  br label %digit
digit:
  %number = phi i64 [ 0, %first ], [ %longer, %more ]
  %character = call i32 @fgetc(ptr %file)
  %value = sub i32 %character, 48
  %is_digit = icmp ult i32 %value, 10
  %short = icmp ult i64 %number, {most_cpus}
  %goes_on = and i1 %is_digit, %short
  br i1 %goes_on, label %more, label %end
more:
  %tenfold = mul i64 %number, 10
  %wide = zext i32 %value to i64
  %longer = add i64 %tenfold, %wide
  br label %digit
end:
  call i32 @fclose(ptr %file)
  %comma = icmp eq i32 %mark, 44
  %dash = icmp eq i32 %mark, 45
  %one = icmp eq i64 %number, 1
  %next_to = and i1 %dash, %one                   ; "0-3" are four threads
  %two = or i1 %comma, %next_to
  %last = icmp eq i32 %character, 10
  %pair = and i1 %two, %last
  %result = select i1 %pair, i64 %number, i64 0
  ret i64 %result
none:
  ret i64 0
}}

; Run a whole launch on the caller's thread, until a part fails.
define i32 @pool_run_alone(ptr %function, ptr %data, i32 %wanted) {{
entry:
  %environment = alloca %environment
  %any = icmp eq i32 %wanted, 0
  %parts = select i1 %any, i32 1, i32 %wanted
  store ptr null, ptr %environment
  %field = getelementptr %environment, ptr %environment, i32 0, i32 1
  store i32 %parts, ptr %field
  br label %next
next:
  %part = phi i32 [ 0, %entry ], [ %following, %next ]
  %error = call i32 %function(i32 %part, ptr %environment, ptr %data)
  %fine = icmp eq i32 %error, 0
  %following = add i32 %part, 1
  %more = icmp slt i32 %following, %parts
  %on = and i1 %fine, %more
  br i1 %on, label %next, label %end
end:
  ret i32 %error
}}

; Publish a launch, for a caller that has the pool. Returns the number of the launch.
define i64 @pool_publish(ptr %function, ptr %data) {{
entry:
  %threads = load i32, ptr @threads
  store ptr %function, ptr @function
  store ptr %data, ptr @data
  store i32 %threads, ptr getelementptr (%environment, ptr @environment, i32 0, i32 1)
  store i32 %threads, ptr @left
  %last = load i64, ptr @launch
  %launch = add i64 %last, 1
  store i64 %launch, ptr @launch
  %free = shl i64 %launch, 1
  br label %next
next:
  %part = phi i32 [ 1, %entry ], [ %following, %open ]
  %more = icmp slt i32 %part, %threads
  br i1 %more, label %open, label %call
open:
  %index = zext i32 %part to i64
  %slot = getelementptr [8 x i64], ptr @slots, i64 %index
  store atomic i64 %free, ptr %slot release, align 8
  %following = add i32 %part, 1
  br label %next
call:
  fence seq_cst
  %asleep = load atomic i32, ptr @sleepers seq_cst, align 4
  %none = icmp eq i32 %asleep, 0
  br i1 %none, label %end, label %rouse
rouse:
  %start = call i64 @pool_read_clock()
  call void @pool_spread()
  %count = atomicrmw xchg ptr @sleepers, i32 0 seq_cst
  %direct = call i32 @llvm.umin.i32(i32 %count, i32 2)
  %rest = sub i32 %count, %direct
  %before = atomicrmw add ptr @unwoken, i32 %rest seq_cst
  br label %check
check:
  %done = phi i32 [ 0, %rouse ], [ %posted, %post ]
  %others = icmp slt i32 %done, %direct
  br i1 %others, label %post, label %roused
post:
  call i32 @sem_post(ptr @wake)
  %posted = add i32 %done, 1
  br label %check
roused:
  %stop = call i64 @pool_read_clock()
  %cost = sub i64 %stop, %start
  %credit = load i64, ptr @credit
  %less = sub i64 %credit, %cost
  store i64 %less, ptr @credit
  br label %end
end:
  ret i64 %launch
}}

; Add a processor to a set, if the set can hold it.
define void @pool_mark(ptr %set, i64 %cpu) {{
entry:
  %fits = icmp ult i64 %cpu, {most_cpus}
  br i1 %fits, label %add, label %end
add:
  %word = lshr i64 %cpu, 6
  %shift = and i64 %cpu, 63
  %bit = shl i64 1, %shift
  %place = getelementptr i64, ptr %set, i64 %word
  %before = load i64, ptr %place
  %with = or i64 %before, %bit
  store i64 %with, ptr %place
  br label %end
end:
  ret void
}}

; Keep the caller on its processor. Returns 1 if this was done. @pool_take_back undoes it.
define i32 @pool_stay() {{
entry:
  %only = alloca [{cpu_words} x i64]
  %binds = load i32, ptr @binds
  %may = icmp ne i32 %binds, 0
  br i1 %may, label %look, label %no
look:
  store [{cpu_words} x i64] zeroinitializer, ptr %only
  %cpu = call i32 @sched_getcpu()
  %at = sext i32 %cpu to i64
  %known = icmp ult i64 %at, {most_cpus}
  br i1 %known, label %ask, label %no
ask:
  %self = call i64 @pthread_self()
  %refused = call i32 @pthread_getaffinity_np(i64 %self, i64 {cpu_bytes}, ptr @allowed)
  %told = icmp eq i32 %refused, 0
  br i1 %told, label %pin, label %no
pin:
  call void @pool_mark(ptr %only, i64 %at)
  %result = call i32 @pool_give(i64 0, i64 %self, ptr %only)
  ret i32 %result
no:
  ret i32 0
}}

; Change a thread's set of processors, of a worker or the caller (0). 1 if this was done.
define i32 @pool_give(i64 %index, i64 %handle, ptr %set) {{
entry:
  %failed = call i32 @pthread_setaffinity_np(i64 %handle, i64 {cpu_bytes}, ptr %set)
  %fine = icmp eq i32 %failed, 0
  br i1 %fine, label %note, label %end
note:
  %value = load [{cpu_words} x i64], ptr %set
  %given = getelementptr [{cpu_words} x i64], ptr @given, i64 %index
  store [{cpu_words} x i64] %value, ptr %given
  br label %end
end:
  %result = zext i1 %fine to i32
  ret i32 %result
}}

; Whether a thread has the set that @pool_give gave it. Nobody else, such as taskset, has changed it.
define i1 @pool_is_given(i64 %index, i64 %handle) {{
entry:
  %now = alloca [{cpu_words} x i64]
  %refused = call i32 @pthread_getaffinity_np(i64 %handle, i64 {cpu_bytes}, ptr %now)
  %told = icmp eq i32 %refused, 0
  br i1 %told, label %compare, label %other
compare:
  %i = phi i64 [ 0, %entry ], [ %i_next, %compare ]
  %difference = phi i64 [ 0, %entry ], [ %all, %compare ]
  %place = getelementptr i64, ptr %now, i64 %i
  %word = load i64, ptr %place
  %given = getelementptr [{cpu_words} x i64], ptr @given, i64 %index, i64 %i
  %given_word = load i64, ptr %given
  %changed = xor i64 %word, %given_word
  %all = or i64 %difference, %changed
  %i_next = add i64 %i, 1
  %again = icmp ult i64 %i_next, {cpu_words}
  br i1 %again, label %compare, label %end
end:
  %same = icmp eq i64 %all, 0
  ret i1 %same
other:
  ret i1 false
}}

; Give this thread, a worker or the caller (0), back the processors that it had.
define void @pool_take_back(i64 %index) {{
entry:
  %self = call i64 @pthread_self()
  %same = call i1 @pool_is_given(i64 %index, i64 %self)
  br i1 %same, label %return, label %end
return:
  %allowed = getelementptr [{cpu_words} x i64], ptr @allowed, i64 %index
  call i32 @pthread_setaffinity_np(i64 %self, i64 {cpu_bytes}, ptr %allowed)
  br label %end
end:
  ret void
}}

; Have sleeping workers wake on processors other than the caller's and one another's, if there are
; others. What the system refuses is left as it is.
define void @pool_spread() {{
entry:
  %used = alloca [{cpu_words} x i64]              ; cpu_set_t
  %used_cores = alloca [{cpu_words} x i64]        ; with the other threads of these cores
  %others = alloca [{cpu_words} x i64]
  %other_cores = alloca [{cpu_words} x i64]
  %binds = load i32, ptr @binds
  %may = icmp ne i32 %binds, 0
  br i1 %may, label %ours, label %end
ours:                                             ; after a fork a handle would stand for the caller
  %process = load i32, ptr @process
  %here = call i32 @getpid()
  %same = icmp eq i32 %process, %here
  br i1 %same, label %begin, label %end
begin:
  store [{cpu_words} x i64] zeroinitializer, ptr %used
  store [{cpu_words} x i64] zeroinitializer, ptr %used_cores
  %sibling = load i64, ptr @sibling
  %own = call i32 @sched_getcpu()
  %own_place = sext i32 %own to i64
  %threads = load i32, ptr @threads
  %most = call i32 @llvm.umin.i32(i32 %threads, i32 {most_spread})
  br label %see
see:                                              ; the worker and where it sleeps, or where the caller runs
  %worker = phi i32 [ 0, %begin ], [ %next, %more ]
  %cpu = phi i64 [ %own_place, %begin ], [ %sleeps_on, %more ]
  %before_claim = phi i64 [ 0, %begin ], [ %stored, %more ]
  %index = zext i32 %worker to i64
  %known = icmp ult i64 %cpu, {most_cpus}         ; not -1
  br i1 %known, label %look, label %skip
look:
  %sleeps = icmp ne i32 %worker, 0
  br i1 %sleeps, label %claim, label %mark
claim:                                            ; unless it wakes up just now
  %bed = getelementptr [8 x i64], ptr @slots, i64 %index, i64 1
  %above = add i64 %cpu, 1
  %calm = shl i64 %above, 2
  %busy = or i64 %calm, 1
  %done = or i64 %calm, 2
  %attempt = cmpxchg ptr %bed, i64 %before_claim, i64 %busy acquire monotonic
  %mine = extractvalue {{ i64, i1 }} %attempt, 1
  br i1 %mine, label %decide, label %mark
decide:                                           ; it may have slept on since it was excluded before
  %place_of_handle = getelementptr i64, ptr @handles, i64 %index
  %handle = load i64, ptr %place_of_handle
  %allowed = getelementptr [{cpu_words} x i64], ptr @allowed, i64 %index
  %fresh = icmp eq i64 %before_claim, %calm
  br i1 %fresh, label %ask, label %recall
recall:
  %known_set = call i1 @pool_is_given(i64 %index, i64 %handle)
  br i1 %known_set, label %exclude, label %ask
ask:
  %refused = call i32 @pthread_getaffinity_np(i64 %handle, i64 {cpu_bytes}, ptr %allowed)
  %told = icmp eq i32 %refused, 0
  br i1 %told, label %exclude, label %release
exclude:
  %i = phi i64 [ 0, %ask ], [ 0, %recall ], [ %i_next, %exclude ]
  %some = phi i64 [ 0, %ask ], [ 0, %recall ], [ %some_more, %exclude ]
  %some_cores = phi i64 [ 0, %ask ], [ 0, %recall ], [ %some_more_cores, %exclude ]
  %from = getelementptr i64, ptr %allowed, i64 %i
  %all = load i64, ptr %from
  %taken_from = getelementptr i64, ptr %used, i64 %i
  %taken = load i64, ptr %taken_from
  %free = xor i64 %taken, -1
  %left = and i64 %all, %free
  %to = getelementptr i64, ptr %others, i64 %i
  store i64 %left, ptr %to
  %some_more = or i64 %some, %left
  %taken_cores_from = getelementptr i64, ptr %used_cores, i64 %i
  %taken_cores = load i64, ptr %taken_cores_from
  %free_cores = xor i64 %taken_cores, -1
  %left_cores = and i64 %all, %free_cores
  %to_cores = getelementptr i64, ptr %other_cores, i64 %i
  store i64 %left_cores, ptr %to_cores
  %some_more_cores = or i64 %some_cores, %left_cores
  %i_next = add i64 %i, 1
  %again = icmp ult i64 %i_next, {cpu_words}
  br i1 %again, label %exclude, label %judge
judge:
  %any = icmp ne i64 %some_more, 0
  br i1 %any, label %move, label %release
move:
  %any_core = icmp ne i64 %some_more_cores, 0
  %set = select i1 %any_core, ptr %other_cores, ptr %others
  %gave = call i32 @pool_give(i64 %index, i64 %handle, ptr %set)
  %moved = icmp ne i32 %gave, 0
  %outcome = select i1 %moved, i64 %done, i64 %before_claim
  br label %release
release:
  %state = phi i64 [ %calm, %ask ], [ %before_claim, %judge ], [ %outcome, %move ]
  store atomic i64 %state, ptr %bed release, align 8
  br label %mark
mark:
  call void @pool_mark(ptr %used, i64 %cpu)
  call void @pool_mark(ptr %used_cores, i64 %cpu)
  %near = icmp eq i64 %sibling, 1
  %twin = xor i64 %cpu, 1
  %is_first = icmp ult i64 %cpu, %sibling
  %behind = add i64 %cpu, %sibling
  %ahead = sub i64 %cpu, %sibling
  %across = select i1 %is_first, i64 %behind, i64 %ahead
  %second = select i1 %near, i64 %twin, i64 %across        ; itself if there is one thread a core
  call void @pool_mark(ptr %used_cores, i64 %second)
  br label %skip
skip:
  %next = add i32 %worker, 1
  %rest = icmp slt i32 %next, %most
  br i1 %rest, label %more, label %end
more:
  %next_index = zext i32 %next to i64
  %next_bed = getelementptr [8 x i64], ptr @slots, i64 %next_index, i64 1
  %stored = load atomic i64, ptr %next_bed monotonic, align 8
  %plus_1 = lshr i64 %stored, 2
  %sleeps_on = sub i64 %plus_1, 1
  br label %see
end:
  ret void
}}

; First task of a woken worker: it wakes two more workers.
define i32 @pool_wake_others() {{
entry:
  br label %next
next:
  %woken = phi i32 [ 0, %entry ], [ %woken, %try ], [ %more, %post ]
  %left = load atomic i32, ptr @unwoken seq_cst, align 4
  %some = icmp sgt i32 %left, 0
  %few = icmp slt i32 %woken, 2
  %go = and i1 %some, %few
  br i1 %go, label %try, label %end
try:
  %fewer = sub i32 %left, 1
  %attempt = cmpxchg ptr @unwoken, i32 %left, i32 %fewer seq_cst seq_cst
  %mine = extractvalue {{ i32, i1 }} %attempt, 1
  br i1 %mine, label %post, label %next
post:
  call i32 @sem_post(ptr @wake)
  %more = add i32 %woken, 1
  br label %next
end:
  ret i32 0
}}

; Claim and compute parts of a launch, starting with part %first. Returns their number.
define i32 @pool_compute(i64 %launch, i32 %first) {{
entry:
  %free = shl i64 %launch, 1
  %claimed = or i64 %free, 1
  %threads = load atomic i32, ptr @threads monotonic, align 4
  br label %next
next:
  %steps = phi i32 [ 0, %entry ], [ %step, %after ]
  %part = phi i32 [ %first, %entry ], [ %following, %after ]
  %count = phi i32 [ 0, %entry ], [ %counted, %after ]
  %index = zext i32 %part to i64
  %slot = getelementptr [8 x i64], ptr @slots, i64 %index
  %attempt = cmpxchg ptr %slot, i64 %free, i64 %claimed acq_rel monotonic
  %mine = extractvalue {{ i64, i1 }} %attempt, 1
  br i1 %mine, label %compute, label %after
compute:
  %function = load ptr, ptr @function
  %data = load ptr, ptr @data
  %error = call i32 %function(i32 %part, ptr @environment, ptr %data)
  %more = add i32 %count, 1
  %fine = icmp eq i32 %error, 0
  br i1 %fine, label %after, label %fail
fail:
  store atomic i32 %error, ptr @failed monotonic, align 4
  br label %after
after:
  %counted = phi i32 [ %count, %next ], [ %more, %compute ], [ %more, %fail ]
  %step = add i32 %steps, 1
  %up = add i32 %part, 1
  %past = icmp sge i32 %up, %threads
  %following = select i1 %past, i32 1, i32 %up    ; part 0 is the caller's
  %again = icmp slt i32 %step, %threads
  br i1 %again, label %next, label %end
end:
  ret i32 %counted
}}

; Run a launch as the caller: compute part 0 and free parts, and wait for the rest. Returns 0, or the
; error code of a failed part.
define i32 @pool_finish(i64 %launch) {{
entry:
  %function = load ptr, ptr @function
  %data = load ptr, ptr @data
  %start = call i64 @pool_read_clock()
  %error = call i32 %function(i32 0, ptr @environment, ptr %data)
  %others = call i32 @pool_compute(i64 %launch, i32 1)
  %computed = add i32 %others, 1
  %before = atomicrmw sub ptr @left, i32 %computed seq_cst
  %own_end = call i64 @pool_read_clock()
  br label %look
look:
  %turn = phi i32 [ 0, %entry ], [ %turned, %pause ]
  %left = load atomic i32, ptr @left acquire, align 4
  %over = icmp eq i32 %left, 0
  br i1 %over, label %judge, label %patient
patient:
  %turned = add i32 %turn, 1
  %long = icmp sgt i32 %turned, {caller_turns}
  br i1 %long, label %sleep, label %pause
pause:
  {pause}
  br label %look
sleep:
  store atomic i32 1, ptr @waiting seq_cst, align 4
  %still = load atomic i32, ptr @left seq_cst, align 4
  %now = icmp eq i32 %still, 0
  br i1 %now, label %awake, label %wait
wait:
  %stays = call i32 @pool_stay()
  call i32 @sem_wait(ptr @finished)               ; may belong to an earlier launch: look again
  %stayed = icmp ne i32 %stays, 0
  br i1 %stayed, label %free, label %sleep
free:
  call void @pool_take_back(i64 0)
  br label %sleep
awake:
  store atomic i32 0, ptr @waiting seq_cst, align 4
  br label %judge
judge:                                            ; what the launch saved and what it cost
  %stop = call i64 @pool_read_clock()
  %own = sub i64 %own_end, %start
  %waited = sub i64 %stop, %own_end
  %threads = load i32, ptr @threads
  %spared = sub i32 %threads, %computed
  %parts = zext i32 %spared to i64
  %done = zext i32 %computed to i64
  %mean = udiv i64 %own, %done
  %part = call i64 @llvm.smin.i64(i64 %mean, i64 {most_saved})
  %saved = mul i64 %part, %parts
  %cost = call i64 @pool_count_losses(i64 %launch)
  %lost = add i64 %waited, %cost
  %gain = sub i64 %saved, %lost
  %former_credit = load i64, ptr @credit
  %earned = add i64 %former_credit, %gain
  %credit = call i64 @llvm.smin.i64(i64 %earned, i64 {max_spin_credit})
  store i64 %credit, ptr @credit
  %spent = icmp slt i64 %credit, 0
  br i1 %spent, label %resign, label %end
resign:
  store i64 {initial_spin_credit}, ptr @credit
  %last = load i64, ptr @last_backoff
  %since = sub i64 %stop, %last
  %former = load i64, ptr @backoff
  %fourfold = shl i64 %former, 2
  %long_ago = add i64 %fourfold, {backoff_window}
  %again = icmp slt i64 %since, %long_ago
  %double = shl i64 %former, 1
  %capped = call i64 @llvm.smin.i64(i64 %double, i64 {max_backoff})
  %backoff = select i1 %again, i64 %capped, i64 {min_backoff}
  %until = add i64 %stop, %backoff
  store i64 %backoff, ptr @backoff
  store i64 %until, ptr @backoff_until
  store i64 %until, ptr @last_backoff
  store i64 0, ptr @counted_thread                ; losses during a back-off are not due to workers
  store i64 0, ptr @next_count
  br label %end
end:
  %failed = load atomic i32, ptr @failed monotonic, align 4
  %fine = icmp eq i32 %failed, 0
  br i1 %fine, label %release, label %forget
forget:
  store atomic i32 0, ptr @failed monotonic, align 4
  br label %release
release:
  store atomic i32 0, ptr @lock release, align 4
  %either = select i1 %fine, i32 %error, i32 %failed
  ret i32 %either
}}

; Nanoseconds that the caller lost since the last count: {switch} for each time that another thread got
; its processor. Counted every {interval} launches.
define i64 @pool_count_losses(i64 %launch) {{
entry:
  %usage = alloca [32 x i64]                      ; struct rusage
  %due = load i64, ptr @next_count
  %early = icmp slt i64 %launch, %due
  br i1 %early, label %none, label %ask
none:
  ret i64 0
ask:
  %next = add i64 %launch, {interval}
  store i64 %next, ptr @next_count
  call i32 @getrusage(i32 1, ptr %usage)          ; 1: RUSAGE_THREAD
  %field = getelementptr i64, ptr %usage, i64 17  ; ru_nivcsw
  %count = load i64, ptr %field
  %self = call i64 @pthread_self()
  %former_self = load i64, ptr @counted_thread
  %former = load i64, ptr @counted
  store i64 %self, ptr @counted_thread
  store i64 %count, ptr @counted
  %same = icmp eq i64 %self, %former_self
  br i1 %same, label %compare, label %none
compare:
  %switches = sub i64 %count, %former
  %lost = mul i64 %switches, {switch}
  ret i64 %lost
}}

; Monotonic clock in nanoseconds.
define i64 @pool_read_clock() {{
  %time = alloca {{ i64, i64 }}
  call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %field = getelementptr {{ i64, i64 }}, ptr %time, i32 0, i32 1
  %nanoseconds = load i64, ptr %field
  %whole = mul i64 %seconds, 1000000000
  %sum = add i64 %whole, %nanoseconds
  ret i64 %sum
}}

; Run a launch, for a caller that has the pool.
define i32 @pool_run(ptr %function, ptr %data) {{
  %launch = call i64 @pool_publish(ptr %function, ptr %data)
  %error = call i32 @pool_finish(i64 %launch)
  ret i32 %error
}}

; Run a worker until the library is unloaded.
define i32 @pool_work(i64 %index) {{
entry:
  %worker = trunc i64 %index to i32
  %slot = getelementptr [8 x i64], ptr @slots, i64 %index
  %bed = getelementptr [8 x i64], ptr @slots, i64 %index, i64 1
  br label %fresh
fresh:
  %seen = phi i64 [ 0, %entry ], [ %value, %done ], [ %value, %last ]
  br label %look
look:
  %turn = phi i32 [ 0, %fresh ], [ %turned, %pause ], [ 0, %decide ], [ 0, %return ]
  %value = load atomic i64, ptr %slot acquire, align 8
  %low = and i64 %value, 1
  %open = icmp eq i64 %low, 0
  %unknown = icmp ne i64 %value, %seen
  %work = and i1 %open, %unknown
  br i1 %work, label %compute, label %idle
compute:
  %launch = lshr i64 %value, 1
  %count = call i32 @pool_compute(i64 %launch, i32 %worker)
  %nothing = icmp eq i32 %count, 0
  br i1 %nothing, label %done, label %count_off
count_off:
  %before = atomicrmw sub ptr @left, i32 %count seq_cst
  %final = icmp eq i32 %before, %count
  br i1 %final, label %last, label %done
last:
  %caller = atomicrmw xchg ptr @waiting, i32 0 seq_cst
  %waits = icmp ne i32 %caller, 0
  br i1 %waits, label %tell, label %fresh
tell:
  call i32 @sem_post(ptr @finished)
  br label %done
done:
  br label %fresh
idle:
  %turned = add i32 %turn, 1
  %long = icmp sgt i32 %turned, {worker_turns}
  br i1 %long, label %sleep, label %pause
pause:
  {pause}
  br label %look
sleep:
  %cpu = call i32 @sched_getcpu()
  %above = add i32 %cpu, 1
  %wide = zext i32 %above to i64
  %calm = shl i64 %wide, 2
  store atomic i64 %calm, ptr %bed release, align 8
  %others = atomicrmw add ptr @sleepers, i32 1 seq_cst
  %again = load atomic i64, ptr %slot seq_cst, align 8
  %same = icmp eq i64 %again, %value
  br i1 %same, label %wait, label %retract
retract:                                          ; a launch came: do not sleep, unless it counted us
  %asleep_now = load atomic i32, ptr @sleepers seq_cst, align 4
  %counted = icmp eq i32 %asleep_now, 0
  br i1 %counted, label %wait, label %leave
leave:
  %fewer = sub i32 %asleep_now, 1
  %left_over = cmpxchg ptr @sleepers, i32 %asleep_now, i32 %fewer seq_cst seq_cst
  %left_ok = extractvalue {{ i32, i1 }} %left_over, 1
  br i1 %left_ok, label %awake, label %retract
wait:
  %interrupted = call i32 @sem_wait(ptr @wake)
  %stop = load atomic i32, ptr @stopping acquire, align 4
  %end_now = icmp ne i32 %stop, 0
  br i1 %end_now, label %end, label %woken
woken:
  call i32 @pool_wake_others()
  br label %awake
awake:
  %state = load atomic i64, ptr %bed monotonic, align 8
  %changing = and i64 %state, 1
  %settled = icmp eq i64 %changing, 0
  br i1 %settled, label %rise, label %stand_by
stand_by:                                         ; the caller is about to be done
  {pause}
  br label %awake
rise:
  %attempt = cmpxchg ptr %bed, i64 %state, i64 0 acquire monotonic
  %risen = extractvalue {{ i64, i1 }} %attempt, 1
  br i1 %risen, label %decide, label %awake
decide:
  %excluded = and i64 %state, 2
  %whole = icmp eq i64 %excluded, 0
  br i1 %whole, label %look, label %return
return:
  call void @pool_take_back(i64 %index)
  br label %look
end:
  ret i32 0
}}

; Stop the workers when the library is unloaded or the process ends. After a fork, the child has no
; workers to stop.
define i32 @pool_stop() {{
entry:
  %threads = load i32, ptr @threads
  %process = load i32, ptr @process
  %here = call i32 @getpid()
  %same = icmp eq i32 %process, %here
  %some = icmp sgt i32 %threads, 1
  %stop = and i1 %same, %some
  br i1 %stop, label %tell, label %end
tell:
  store atomic i32 1, ptr @stopping seq_cst, align 4
  br label %post
post:
  %posted = phi i32 [ 1, %tell ], [ %more, %post ]
  call i32 @sem_post(ptr @wake)
  %more = add i32 %posted, 1
  %posting = icmp slt i32 %more, %threads
  br i1 %posting, label %post, label %join
join:
  %joined = phi i32 [ 1, %post ], [ %next, %join ]
  %index = zext i32 %joined to i64
  %address = getelementptr i64, ptr @handles, i64 %index
  %handle = load i64, ptr %address
  call i32 @pthread_join(i64 %handle, ptr null)
  %next = add i32 %joined, 1
  %joining = icmp slt i32 %next, %threads
  br i1 %joining, label %join, label %gone
gone:
  store i32 1, ptr @threads
  br label %end
end:
  ret i32 0
}}
