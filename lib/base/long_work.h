// Lets whoever lends a thread know that it is going to be kept.
#ifndef LAYERD_LIB_BASE_LONG_WORK_H_
#define LAYERD_LIB_BASE_LONG_WORK_H_

namespace layerd {

using LongWorkHook = void (*)();

// Called on this thread by BeforeLongWork(); null: nobody wants to know.
inline constinit thread_local LongWorkHook on_long_work = nullptr;

// Said before work of more than about ten microseconds on a thread that may be somebody else's. Threads: any.
inline void BeforeLongWork() {
  if (on_long_work != nullptr) on_long_work();
}

}  // namespace layerd

#endif  // LAYERD_LIB_BASE_LONG_WORK_H_
