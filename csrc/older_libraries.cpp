// What GCC 12 asks of the system's libraries and older ones lack, so that a build runs where manylinux_2_28 does.
// What is defined here stays within the extension (exports.map).
#include <new>

#if defined(QUIRE_STATIC_LIBSTDCXX) && defined(__GLIBC__)
#include <pthread.h>

// libstdc++ is linked in, and starts threads by the names that glibc 2.34 has in another library. The linker sends it here
// (--wrap), to the names that every glibc of the processor has.
#if defined(__aarch64__)
#define QUIRE_FIRST_GLIBC "GLIBC_2.17"
#else
#define QUIRE_FIRST_GLIBC "GLIBC_2.2.5"
#endif
__asm__(".symver quire_pthread_create, pthread_create@" QUIRE_FIRST_GLIBC);
__asm__(".symver quire_pthread_join, pthread_join@" QUIRE_FIRST_GLIBC);

extern "C" {
int quire_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument);
int quire_pthread_join(pthread_t thread, void** result);

int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
    return quire_pthread_create(thread, attributes, start, argument);
}

int __wrap_pthread_join(pthread_t thread, void** result) { return quire_pthread_join(thread, result); }

// Since 2.32: whether libstdc++ may count references without atomic operations. A process with this extension has threads.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

#elif defined(__GLIBCXX__)
namespace std {

// Since 3.4.29: containers' allocators call it.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
#endif
