// Threads and scratch memory of the native ops.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

using Task = void (*)(void* context, int64_t index, int thread);

// Runs task(context, i, thread) for every i in [0, count) on the pool; `thread` < thread_count(). Each index runs once, on
// any thread: a task may depend on its index only. Tasks must not throw and must not call parallel_tasks.
void parallel_tasks(int64_t count, Task task, void* context);

// Threads that run tasks, the caller's included.
int thread_count();
// 0 = the cores of the affinity mask. Takes effect at the next op or recording: one under way keeps what it has sized its memory by.
void set_thread_count(int threads, bool pin);

// While one is there, `thread_count()` of this thread stays what it is, and no more threads than that run its tasks, whatever
// another engine of the process sets meanwhile.
class SameThreads {
   public:
    SameThreads();
    ~SameThreads();
    SameThreads(const SameThreads&) = delete;
    SameThreads& operator=(const SameThreads&) = delete;

   private:
    int before_;
};

// At least `bytes` of 64-byte aligned memory in huge pages, owned by the calling thread and valid until its next call with
// the same `use`. Throws std::bad_alloc, and when a task asks: memory of tasks is taken before they begin, so that they cannot fail.
enum class Scratch {
    kActivations, kScales, kAttention, kTasks, kSpans, kHidden, kHiddenScales, kWork, kExperts, kPieces, kPairs, kPairScales, kCount
};
void* scratch(Scratch use, size_t bytes);

// Asks for huge pages for the whole pages inside [address, address + bytes).
void advise_huge(void* address, size_t bytes);

template <class F>
inline void parallel_for(int64_t count, const F& body) {
    parallel_tasks(
        count, [](void* context, int64_t index, int thread) { (*static_cast<const F*>(context))(index, thread); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// body(begin, end) over pieces of [0, count); work that costs less than a fork runs on the caller. `cost` is in elements
// touched per index.
template <class F>
inline void parallel_ranges(int64_t count, int64_t cost, const F& body) {
    constexpr int64_t kGrain = 16384;  // elements: about 2 us of work, ten times a fork
    int64_t per = cost > 0 ? (kGrain + cost - 1) / cost : count;
    if (per < 1) per = 1;
    if (count <= per || thread_count() == 1) {
        if (count > 0) body(int64_t{0}, count);
        return;
    }
    const int64_t most = int64_t{thread_count()} * 8;
    if ((count + per - 1) / per > most) per = (count + most - 1) / most;
    parallel_for((count + per - 1) / per, [&](int64_t i, int) {
        const int64_t begin = i * per;
        body(begin, begin + per < count ? begin + per : count);
    });
}

}  // namespace quire
