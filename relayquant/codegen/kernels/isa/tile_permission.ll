; Asks Linux once per process whether it may use the tile registers of AMX. matrix_unit.py explains.
;
; arch_prctl (158) with ARCH_REQ_XCOMP_PERM (0x1023) for XTILEDATA (18) returns 0 if this process may
; use them from now on, in all of its threads and forked children. Kernels of Linux before 5.16, CPUs
; without AMX, sandboxes that filter system calls, and small signal stacks refuse. Without the
; permission the first tile instruction ends the process. Threads that ask at the same time get the
; same answer. Every library has its own copy of the answer: 0 not asked, 1 granted, 2 refused. The
; runtime reads it (tiles.py there).

@relayquant_tile_permission = linkonce_odr protected global i8 0

define linkonce_odr hidden i32 @relayquant_may_use_tiles() {
entry:
  %known = load atomic i8, ptr @relayquant_tile_permission monotonic, align 1
  %is_known = icmp ne i8 %known, 0
  br i1 %is_known, label %answer, label %ask
ask:
  %result = call i64 asm sideeffect "syscall", "={ax},{ax},{di},{si},~{rcx},~{r11},~{memory},~{dirflag},~{fpsr},~{flags}"(i64 158, i64 4131, i64 18)
  %is_granted = icmp eq i64 %result, 0
  %asked = select i1 %is_granted, i8 1, i8 2
  store atomic i8 %asked, ptr @relayquant_tile_permission monotonic, align 1
  br label %answer
answer:
  %state = phi i8 [ %known, %entry ], [ %asked, %ask ]
  %may = icmp eq i8 %state, 1
  %result_code = zext i1 %may to i32
  ret i32 %result_code
}
