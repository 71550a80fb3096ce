// What headers of GCC 12 ask of libstdc++ and that of GCC 8 lacks, so that a build runs where manylinux_2_28 does.
// What is defined here stays within the extension (exports.map).
#include <exception>
#include <new>

#if defined(__GLIBCXX__)

// What copied and ended an exception_ptr before its inline functions counted references themselves; every libstdc++ still has it.
extern "C" {
void quire_copy_exception(void* to, const void* from) noexcept __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void quire_end_exception(void* at) noexcept __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
}

namespace std {

// Since 3.4.29: containers' allocators call it.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

namespace __exception_ptr {

// Since CXXABI 1.3.13. A copy that nobody ends is a reference; one that is ended in its place takes it back.
void exception_ptr::_M_addref() noexcept {
    void* copy;
    quire_copy_exception(&copy, this);
}

void exception_ptr::_M_release() noexcept { quire_end_exception(this); }

}  // namespace __exception_ptr
}  // namespace std
#endif
