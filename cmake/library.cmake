# liballreduce.a and liballreduce.so out of the same objects: one translation unit per backend, one for the C API.

find_package(Threads REQUIRED)

# The hash of csrc/, as a header that changes only when it does, so that api.cpp alone is compiled again for it.
set(ar_hash_header ${PROJECT_BINARY_DIR}/generated/ar_source_hash.h)
add_custom_target(source_hash
  COMMAND ${CMAKE_COMMAND} -DSCRIPT=${PROJECT_SOURCE_DIR}/scripts/source-hash.sh -DOUT=${ar_hash_header}
          -P ${PROJECT_SOURCE_DIR}/cmake/source-hash.cmake
  BYPRODUCTS ${ar_hash_header})

add_library(allreduce_objects OBJECT csrc/all_emulated.cpp csrc/api.cpp)
add_dependencies(allreduce_objects source_hash)
target_include_directories(allreduce_objects PRIVATE csrc csrc/include)
target_compile_options(allreduce_objects PRIVATE -Wall -Wextra -ffp-contract=off -fvisibility=hidden)
target_compile_definitions(allreduce_objects PRIVATE AR_WITH_CUDA=$<BOOL:${AR_WITH_CUDA}>)
set_property(SOURCE csrc/api.cpp APPEND PROPERTY COMPILE_OPTIONS -include ${ar_hash_header})
set_property(SOURCE csrc/api.cpp APPEND PROPERTY OBJECT_DEPENDS ${ar_hash_header})
set(ar_objects $<TARGET_OBJECTS:allreduce_objects>)

set(AR_LINK_LIBS Threads::Threads ${CMAKE_DL_LIBS} rt m)
if(AR_WITH_CUDA)
  add_library(allreduce_cuda_objects OBJECT csrc/all_cuda.cu)
  target_include_directories(allreduce_cuda_objects PRIVATE csrc csrc/include)
  ar_cuda_flags(allreduce_cuda_objects)
  list(APPEND ar_objects $<TARGET_OBJECTS:allreduce_cuda_objects>)
  list(PREPEND AR_LINK_LIBS ${AR_CUDART_STATIC})
  # internal/core's #cgo line has one -L, the build folder: the static runtime goes there too.
  file(CREATE_LINK ${AR_CUDART_STATIC} ${PROJECT_BINARY_DIR}/libcudart_static.a COPY_ON_ERROR SYMBOLIC)
endif()

add_library(allreduce STATIC ${ar_objects})
add_library(allreduce_shared SHARED ${ar_objects})

configure_file(cmake/allreduce.map.in ${PROJECT_BINARY_DIR}/generated/allreduce.map @ONLY)
set(ar_map ${PROJECT_BINARY_DIR}/generated/allreduce.map)
set_target_properties(allreduce_shared PROPERTIES
  OUTPUT_NAME allreduce
  # Not beside the archive: the linker would prefer it for -lallreduce.
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/shared
  VERSION ${AR_ABI}.${PROJECT_VERSION}
  SOVERSION ${AR_ABI}
  LINK_DEPENDS ${ar_map})
target_link_options(allreduce_shared PRIVATE
  "LINKER:--no-undefined" "LINKER:--version-script=${ar_map}" "LINKER:--exclude-libs=ALL")
target_link_libraries(allreduce_shared PRIVATE ${AR_LINK_LIBS})
target_link_libraries(allreduce INTERFACE ${AR_LINK_LIBS})
foreach(target allreduce allreduce_shared)
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  target_include_directories(${target} INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()
