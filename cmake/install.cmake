# `make install PREFIX=`: both libraries, the static CUDA runtime the archive needs, headers, pkg-config.

set(AR_PC_PRIVATE "-lstdc++ -lm -lrt -ldl -lpthread")
if(AR_WITH_CUDA)
  string(PREPEND AR_PC_PRIVATE "-lcudart_static ")
  file(REAL_PATH ${AR_CUDART_STATIC} ar_cudart_real)
  install(FILES ${ar_cudart_real} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libcudart_static.a)
endif()
install(TARGETS allreduce allreduce_shared
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY csrc/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
# ${pcfiledir} keeps the file right wherever the prefix ends up.
file(RELATIVE_PATH AR_PC_PREFIX /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
configure_file(cmake/allreduce.pc.in ${PROJECT_BINARY_DIR}/generated/allreduce.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/generated/allreduce.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
