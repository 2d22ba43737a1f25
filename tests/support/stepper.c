/* A traced child: run to the first instruction of a function, go on instruction by instruction, kill. x86-64 Linux. */
#include <errno.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

int trace_me(void) { return ptrace(PTRACE_TRACEME, 0, 0, 0) ? -1 : 0; }

/* Continue to *address*, which is reached once; 0, and in *back* where the function will return to. */
int run_to(int pid, long address, long *back) {
    struct user_regs_struct registers;
    int status;
    errno = 0;
    long original = ptrace(PTRACE_PEEKTEXT, pid, address, 0);
    if (errno) return -1;
    if (ptrace(PTRACE_POKETEXT, pid, address, (original & ~0xffL) | 0xcc)) return -2;
    if (ptrace(PTRACE_CONT, pid, 0, 0)) return -3;
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) return -4;
    ptrace(PTRACE_GETREGS, pid, 0, &registers);
    if ((long)registers.rip != address + 1) return -5;
    registers.rip = (unsigned long)address;
    ptrace(PTRACE_SETREGS, pid, 0, &registers);
    ptrace(PTRACE_POKETEXT, pid, address, original);
    *back = ptrace(PTRACE_PEEKDATA, pid, registers.rsp, 0);
    return 0;
}

/* Make at most *steps* instructions, and stop where the function has returned; how many were made. */
long step(int pid, long steps, long back) {
    struct user_regs_struct registers;
    int status;
    long made;
    for (made = 0; made < steps; made++) {
        if (ptrace(PTRACE_SINGLESTEP, pid, 0, 0)) return -1;
        if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) return -2;
        ptrace(PTRACE_GETREGS, pid, 0, &registers);
        if ((long)registers.rip == back) return made + 1;
    }
    return made;
}

void slay(int pid) {
    int status;
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
}
